"""What a model family is given: inputs of a kind, drawn to fit the model's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Draw:
    """Tensors of a call. ``length`` is that of its text; below 100 the model is tiny, and so is all else."""

    length: int
    batch: int
    dtype: torch.dtype

    @property
    def tiny(self) -> bool:
        return self.length < 100

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape).to(self.dtype)

    def ids(self, vocabulary: int, *shape: int) -> Tensor:
        """Token ids, without the three that are often special."""
        return torch.randint(min(3, vocabulary - 1), vocabulary, (self.batch, *shape))

    def tokens(self, config: Any, length: int | None = None) -> Tensor:
        return self.ids(_of(config, "vocab_size", 97), length or self.length)

    def beside(self, config: Any, marks: int, mark: int) -> Tensor:
        """Tokens of which ``marks`` after the first are the id ``mark``, which stands for something else."""
        kept = self.ids(min(_of(config, "vocab_size", 97), mark), max(self.length - marks, 8))
        placeholders = torch.full((self.batch, marks), mark)
        return torch.cat((kept[:, :1], placeholders, kept[:, 1:]), 1)


def _mark(config: Any, kind: str) -> int:
    """The id that stands for an image or for audio."""
    return int(next(v for n in ("id", "index") if isinstance(v := getattr(config, f"{kind}_token_{n}", None), int)))


def _of(config: Any, name: str, otherwise: int) -> int:
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "text_encoder", "decoder"))):
        value = getattr(part, name, None)
        if isinstance(value, int):
            return value
    return otherwise


def _side(value: Any) -> int:
    return value if isinstance(value, int) else int(value[0])


def _image(draw: Draw, config: Any) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = _side(getattr(vision, "image_size", 32))
    return draw.normal(getattr(vision, "num_channels", 3), size, size)


def _plain(draw: Draw, config: Any) -> dict[str, Any]:
    return {"input_ids": draw.tokens(config)}


def _pair(draw: Draw, config: Any) -> dict[str, Any]:
    tokens = draw.tokens(config)
    return {"input_ids": tokens, "decoder_input_ids": tokens[:, : draw.length // 2], "use_cache": False}


def _picture(draw: Draw, config: Any) -> dict[str, Any]:
    return {"pixel_values": _image(draw, config)}


def _picture_text(draw: Draw, config: Any) -> dict[str, Any]:
    vision = config.vision_config
    patches = (_side(vision.image_size) // _side(vision.patch_size)) ** 2
    return {
        "input_ids": draw.beside(config, patches, _mark(config, "image")),
        "pixel_values": _image(draw, config),
        "use_cache": False,
    }


def _patches_text(draw: Draw, config: Any) -> dict[str, Any]:
    """One image of square size a sequence, cut into patches already, some of which become one token."""
    vision = config.vision_config
    side, merged = (4, vision.spatial_merge_size**2) if draw.tiny else (32, vision.spatial_merge_size**2)
    tokens = draw.beside(config, side * side // merged, config.image_token_id)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": tokens,
        "pixel_values": draw.normal(side * side, width).flatten(0, 1),
        "image_grid_thw": torch.tensor([[1, side, side]] * draw.batch),
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
        "use_cache": False,
    }


def _codes_text(draw: Draw, config: Any) -> dict[str, Any]:
    """An image that becomes tokens of the text's own vocabulary."""
    coder = config.vq_config
    side = coder.resolution // 2 ** (len(coder.channel_multiplier) - 1)
    return {
        "input_ids": draw.beside(config, side * side, config.vocabulary_map["<image>"]),
        "pixel_values": draw.normal(coder.in_channels, coder.resolution, coder.resolution),
        "use_cache": False,
    }


def _points(draw: Draw, config: Any) -> dict[str, Any]:
    image = _image(draw, config)
    place = torch.randint(0, image.shape[-1], (draw.batch, 1, 2, 2)).to(draw.dtype)
    return {"pixel_values": image, "input_points": place}


def _mel(draw: Draw, config: Any) -> dict[str, Any]:
    mel = draw.normal(config.num_mel_bins, 2 * int(config.max_source_positions))
    return {"input_features": mel, "decoder_input_ids": draw.tokens(config)[:, :16], "use_cache": False}


def _mel_text(draw: Draw, config: Any) -> dict[str, Any]:
    audio = config.audio_config
    frames = 2 * int(audio.max_source_positions)
    heard = (audio.max_source_positions - 2) // 2 + 1
    return {
        "input_ids": draw.beside(config, heard, _mark(config, "audio")),
        "input_features": draw.normal(audio.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(draw.batch, frames, dtype=torch.long),
        "use_cache": False,
    }


def _frames(draw: Draw, config: Any) -> dict[str, Any]:
    encoder = getattr(config, "encoder_config", None) or config
    width = next(w for n in _WIDTHS if isinstance(w := getattr(encoder, n, None), int))
    return {"input_features": draw.normal(64 if draw.tiny else 1024, width)}


_WIDTHS = ("feature_projection_input_dim", "num_mel_bins", "model_in_dim")


def _patched_frames(draw: Draw, config: Any) -> dict[str, Any]:
    return {"input_values": draw.normal(config.max_length, config.num_mel_bins)}


def _frames_pair(draw: Draw, config: Any) -> dict[str, Any]:
    return {**_frames(draw, config), "decoder_input_ids": draw.tokens(config)[:, :16], "use_cache": False}


def _spectrogram(draw: Draw, config: Any) -> dict[str, Any]:
    return {"spectrogram": draw.normal(12 if draw.tiny else 512, config.model_in_dim)}


def _spoken(draw: Draw, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draw.tokens(config, min(draw.length, 200)),
        "decoder_input_values": draw.normal(8 if draw.tiny else 800, config.num_mel_bins),
        "speaker_embeddings": draw.normal(config.speaker_embedding_dim),
        "use_cache": False,
    }


def _sound(draw: Draw) -> Tensor:
    return draw.normal(1600 if draw.tiny else 80_000)


def _speech(draw: Draw, config: Any) -> dict[str, Any]:
    return {"input_values": _sound(draw)}


def _speech_pair(draw: Draw, config: Any) -> dict[str, Any]:
    return {"input_values": _sound(draw), "decoder_input_ids": draw.tokens(config)[:, :16], "use_cache": False}


def _audio(draw: Draw, config: Any) -> dict[str, Any]:
    return {"input_values": _sound(draw).unsqueeze(1)}


def _books(draw: Draw, config: Any) -> dict[str, Any]:
    """Text, and codes of each codebook, one sequence after another."""
    books = config.decoder.num_codebooks
    codes = draw.ids(config.decoder.vocab_size, books, draw.length).flatten(0, 1)
    return {"input_ids": draw.tokens(config), "decoder_input_ids": codes, "use_cache": False}


def _book_columns(draw: Draw, config: Any) -> dict[str, Any]:
    """A code of each codebook at each place, all of which are wanted."""
    codes = draw.ids(_of(config, "vocab_size", 97) - 2, draw.length, config.num_codebooks)
    return {"input_ids": codes, "labels": codes, "use_cache": False}


def _dialogue(draw: Draw, config: Any) -> dict[str, Any]:
    """Text beside the codes of two voices. Of a tiny model, one voice's are wanted, too."""
    books, vocabulary = config.num_codebooks, config.audio_vocab_size
    mine, yours = (draw.ids(vocabulary, books, draw.length) for _ in range(2))
    text = draw.tokens(config)
    wanted = {"text_labels": text, "audio_labels": mine} if draw.tiny else {}
    return {"input_ids": text, "moshi_audio_codes": mine, "user_audio_codes": yours, "use_cache": False, **wanted}


KINDS: dict[str, Callable[[Draw, Any], dict[str, Any]]] = {
    "tokens": _plain,
    "pair": _pair,
    "image": _picture,
    "image_text": _picture_text,
    "patches_text": _patches_text,
    "codes_text": _codes_text,
    "points": _points,
    "mel": _mel,
    "mel_text": _mel_text,
    "frames": _frames,
    "frames_pair": _frames_pair,
    "patched_frames": _patched_frames,
    "spectrogram": _spectrogram,
    "spoken": _spoken,
    "speech": _speech,
    "speech_pair": _speech_pair,
    "audio": _audio,
    "books": _books,
    "book_columns": _book_columns,
    "dialogue": _dialogue,
}


@dataclass(frozen=True)
class Inputs:
    """Draws inputs of a kind and calls the model with them."""

    kind: str = "tokens"
    length: int = 17
    batch: int = 2

    def __call__(self, model: nn.Module) -> Any:
        config: Any = model.config
        draw = Draw(self.length, self.batch, next(model.parameters()).dtype)
        given = KINDS[self.kind](draw, config)
        if self.kind == "tokens" and getattr(config, "is_decoder", True) and hasattr(model, "generate"):
            given["use_cache"] = False
        return model(**given)
