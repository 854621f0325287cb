"""Written by `make docs` from the folders beside this file."""

from ferryman.ops.activation.definition import gelu_mul as gelu_mul
from ferryman.ops.activation.definition import gelu_mul_backward as gelu_mul_backward
from ferryman.ops.activation.definition import silu_mul as silu_mul
from ferryman.ops.activation.definition import silu_mul_backward as silu_mul_backward
from ferryman.ops.attention.definition import attention as attention
from ferryman.ops.attention.definition import attention_backward as attention_backward
from ferryman.ops.bias_act.definition import bias_act as bias_act
from ferryman.ops.bias_act.definition import bias_act_backward as bias_act_backward
from ferryman.ops.causal_conv1d.definition import causal_conv1d as causal_conv1d
from ferryman.ops.causal_conv1d.definition import causal_conv1d_backward as causal_conv1d_backward
from ferryman.ops.embedding.definition import embedding as embedding
from ferryman.ops.embedding.definition import embedding_backward as embedding_backward
from ferryman.ops.gate_topk.definition import gate_topk as gate_topk
from ferryman.ops.gate_topk.definition import gate_topk_backward as gate_topk_backward
from ferryman.ops.gated_delta_rule.definition import gated_delta_rule as gated_delta_rule
from ferryman.ops.gated_delta_rule.definition import gated_delta_rule_backward as gated_delta_rule_backward
from ferryman.ops.gated_norm.definition import gated_rms_norm as gated_rms_norm
from ferryman.ops.gated_norm.definition import gated_rms_norm_backward as gated_rms_norm_backward
from ferryman.ops.group_norm.definition import group_norm as group_norm
from ferryman.ops.group_norm.definition import group_norm_backward as group_norm_backward
from ferryman.ops.kv_append.definition import kv_append as kv_append
from ferryman.ops.linear_cross_entropy.definition import linear_cross_entropy as linear_cross_entropy
from ferryman.ops.linear_cross_entropy.definition import linear_cross_entropy_backward as linear_cross_entropy_backward
from ferryman.ops.linear_w4.definition import linear_w4 as linear_w4
from ferryman.ops.matmul.definition import linear as linear
from ferryman.ops.matmul.definition import linear_backward as linear_backward
from ferryman.ops.moe.definition import grouped_linear as grouped_linear
from ferryman.ops.moe.definition import grouped_linear_backward as grouped_linear_backward
from ferryman.ops.moe.definition import moe_experts as moe_experts
from ferryman.ops.moe.definition import moe_experts_backward as moe_experts_backward
from ferryman.ops.moe_permute.definition import moe_combine as moe_combine
from ferryman.ops.moe_permute.definition import moe_combine_backward as moe_combine_backward
from ferryman.ops.moe_permute.definition import moe_permute as moe_permute
from ferryman.ops.moe_permute.definition import moe_permute_backward as moe_permute_backward
from ferryman.ops.norm.definition import add_layer_norm as add_layer_norm
from ferryman.ops.norm.definition import add_layer_norm_backward as add_layer_norm_backward
from ferryman.ops.norm.definition import add_rms_norm as add_rms_norm
from ferryman.ops.norm.definition import add_rms_norm_backward as add_rms_norm_backward
from ferryman.ops.norm.definition import layer_norm as layer_norm
from ferryman.ops.norm.definition import layer_norm_backward as layer_norm_backward
from ferryman.ops.norm.definition import rms_norm as rms_norm
from ferryman.ops.norm.definition import rms_norm_backward as rms_norm_backward
from ferryman.ops.paged_attention.definition import paged_attention as paged_attention
from ferryman.ops.rope.definition import rope as rope
from ferryman.ops.rope.definition import rope_ as rope_
from ferryman.ops.rope.definition import rope_backward as rope_backward
from ferryman.ops.selective_scan.definition import selective_scan as selective_scan
from ferryman.ops.selective_scan.definition import selective_scan_backward as selective_scan_backward
from ferryman.ops.softmax.definition import cross_entropy as cross_entropy
from ferryman.ops.softmax.definition import cross_entropy_backward as cross_entropy_backward
from ferryman.ops.softmax.definition import cross_entropy_inplace_grad as cross_entropy_inplace_grad
from ferryman.ops.softmax.definition import cross_entropy_inplace_grad_backward as cross_entropy_inplace_grad_backward
from ferryman.ops.softmax.definition import softmax as softmax
from ferryman.ops.softmax.definition import softmax_backward as softmax_backward
from ferryman.ops.ssd_scan.definition import ssd_scan as ssd_scan
from ferryman.ops.ssd_scan.definition import ssd_scan_backward as ssd_scan_backward

__all__ = [
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "attention",
    "attention_backward",
    "bias_act",
    "bias_act_backward",
    "causal_conv1d",
    "causal_conv1d_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_inplace_grad",
    "cross_entropy_inplace_grad_backward",
    "embedding",
    "embedding_backward",
    "gate_topk",
    "gate_topk_backward",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_rms_norm",
    "gated_rms_norm_backward",
    "gelu_mul",
    "gelu_mul_backward",
    "group_norm",
    "group_norm_backward",
    "grouped_linear",
    "grouped_linear_backward",
    "kv_append",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_w4",
    "moe_combine",
    "moe_combine_backward",
    "moe_experts",
    "moe_experts_backward",
    "moe_permute",
    "moe_permute_backward",
    "paged_attention",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_",
    "rope_backward",
    "selective_scan",
    "selective_scan_backward",
    "silu_mul",
    "silu_mul_backward",
    "softmax",
    "softmax_backward",
    "ssd_scan",
    "ssd_scan_backward",
]

def _open() -> None: ...
