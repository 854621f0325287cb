"""Text models of transformers' whole registry, drawn by date: what this project never listed ports with parity, too."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from datetime import date
from typing import Any

import pytest
import torch
from torch import nn

from ferryman.errors import PortError
from ferryman.porting.model import bundled, family, generic

transformers = pytest.importorskip("transformers")
from ferryman.integrations.transformers import port  # noqa: E402 - it registers itself

SEED = int(date.today().strftime("%Y%m%d"))
DRAWN = 4  # families of a run
TRIED = 40  # at most: many types are parts of other models, or take more than tokens
LARGEST = 2e7  # parameters of what a default config shrinks to


def built(name: str) -> nn.Module | None:
    """A type's causal or plain model with random weights, if its config shrinks and tokens are all that it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = bundled._shrunk(transformers.CONFIG_MAPPING[name](), {}, 2, True)
            with torch.device("meta"):
                auto: Any = transformers.AutoModelForCausalLM
                if type(config) not in auto._model_mapping:
                    auto = transformers.AutoModel
                size = sum(p.numel() for p in auto.from_config(config).parameters())
            if size > LARGEST:
                return None
            model: nn.Module = bundled.random(auto.__name__, config, torch.float32).eval()
            first, second = (outputs for outputs, _ in (generic.observe(model, run, False) for _ in range(2)))
        except Exception:  # noqa: BLE001 - the library refuses a shrunk config, or such inputs, in many ways
            return None
    alike = first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    return model if alike and first and all(bool(t.isfinite().all()) for t in first.values()) else None


def run(model: nn.Module) -> Any:
    return model(input_ids=torch.randint(3, family.TINY["vocab_size"], (2, 17)))


def test_families_that_nobody_listed_port_with_parity() -> None:
    known = {f.model_type or f.name for f in bundled.FAMILIES.values()}
    names = sorted(set(transformers.CONFIG_MAPPING) - known)
    random.Random(SEED).shuffle(names)
    compared = []
    for name in names[:TRIED]:
        model = built(name)
        if model is None:
            continue
        try:
            parity = generic.compare(model, run)
        except PortError as error:
            assert "nothing in" in str(error), (SEED, name, error)
            continue
        assert parity.ok and parity.restored, (SEED, name, parity.reasons)
        compared.append(name)
        if len(compared) == DRAWN:
            break
    assert len(compared) == DRAWN, (SEED, compared)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_works_on_its_mask_gets_its_own(padded: bool) -> None:
    """DeepSeek V4 joins the mask with one of compressed keys: it may be neither left out nor of another kind."""
    if "deepseek_v4" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no deepseek_v4")
    model = built("deepseek_v4")
    assert model is not None
    given = {"attention_mask": torch.tensor([[0] * 5 + [1] * 12, [1] * 17])} if padded else {}
    parity = generic.compare(
        model, lambda m: m(input_ids=torch.randint(3, family.TINY["vocab_size"], (2, 17)), **given)
    )
    assert parity.ok and parity.restored, parity.reasons
    assert "attention" in parity.calls


def test_a_copy_of_a_model_that_works_on_its_mask_is_the_same() -> None:
    if "deepseek_v4" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no deepseek_v4")
    model = built("deepseek_v4")
    assert model is not None
    tokens = torch.randint(3, family.TINY["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        port(model)
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert generic.relative(twin(input_ids=tokens).logits, wanted) <= 2.0**-16


def test_which_code_works_on_a_mask() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
    from transformers.models.moonshine.modeling_moonshine import MoonshineEncoder
    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Encoder

    from ferryman.integrations.transformers_masks import _class_works

    handed_on = (LlamaAttention, LlamaModel, GPT2Attention, Wav2Vec2Encoder, MoonshineEncoder)
    assert not any(map(_class_works, handed_on))
    assert _class_works(ParakeetEncoderAttention)
