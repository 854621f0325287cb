"""Written by `make docs` from the folders beside this file."""

# ruff: noqa: E501
SCHEMAS: dict[str, tuple[str, ...]] = {
    "activation": (
        "silu_mul(Tensor gate, Tensor up) -> Tensor",
        "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        "gelu_mul(Tensor gate, Tensor up, str approximate) -> Tensor",
        "gelu_mul_backward(Tensor grad, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)",
    ),
    "attention": (
        "attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, int? window, float softcap, Tensor? mask, Tensor? sinks=None, Tensor? key_range=None, int? chunk=None, float dropout_p=0.0, Tensor? dropout_seed=None) -> (Tensor, Tensor)",
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float? scale, int? window, float softcap, Tensor? mask, Tensor? sinks=None, Tensor? key_range=None, int? chunk=None, bool need_mask=False, float dropout_p=0.0, Tensor? dropout_seed=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "bias_act": (
        "bias_act(Tensor x, Tensor? bias, str activation, float? alpha) -> Tensor",
        "bias_act_backward(Tensor grad, Tensor x, Tensor? bias, str activation, float? alpha) -> (Tensor, Tensor)",
    ),
    "causal_conv1d": (
        "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, str? activation) -> (Tensor, Tensor)",
        "causal_conv1d_backward(Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, str? activation) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "embedding": (
        "embedding(Tensor ids, Tensor weight, float? scale) -> Tensor",
        "embedding_backward(Tensor grad, Tensor ids, Tensor weight, float? scale) -> Tensor",
    ),
    "gate_topk": (
        "gate_topk(Tensor logits, int k, str scoring, Tensor? bias, int n_group, int topk_group, bool renormalise, float scale, ScalarType ids_dtype) -> (Tensor, Tensor)",
        "gate_topk_backward(Tensor grad, Tensor logits, Tensor topk_ids, str scoring, bool renormalise, float scale) -> Tensor",
    ),
    "gated_delta_rule": (
        "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? initial_state, float? scale, bool qk_l2norm) -> (Tensor, Tensor)",
        "gated_delta_rule_backward(Tensor grad_y, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? initial_state, float? scale, bool qk_l2norm) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "gated_norm": (
        "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, int? group_size, bool norm_before_gate, bool cast_before_weight, str activation) -> Tensor",
        "gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor? weight, float eps, int? group_size, bool norm_before_gate, str activation) -> (Tensor, Tensor, Tensor)",
    ),
    "group_norm": (
        "group_norm_backward(Tensor grad, Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
        "group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    ),
    "kv_append": (
        "kv_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale, Tensor? v_scale) -> ()",
    ),
    "linear_cross_entropy": (
        "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, int ignore_index, float label_smoothing, float z_loss) -> (Tensor, Tensor)",
        "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor lse, int ignore_index, float label_smoothing, float z_loss, bool need_x, bool need_weight) -> (Tensor, Tensor, Tensor)",
    ),
    "linear_w4": ("linear_w4(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int group) -> Tensor",),
    "matmul": (
        "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        "linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, bool need_x, bool need_weight) -> (Tensor, Tensor, Tensor)",
    ),
    "moe": (
        "grouped_linear(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
        "grouped_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor offsets, bool need_x, bool need_weight) -> (Tensor, Tensor)",
        "moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor topk_ids, Tensor topk_weights, str activation, Tensor? bias) -> Tensor",
        "moe_experts_backward(Tensor grad, Tensor x, Tensor gate_up, Tensor down, Tensor topk_ids, Tensor topk_weights, str activation, Tensor? bias, bool need_x, bool need_gate_up, bool need_down, bool need_topk_weights, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "moe_permute": (
        "moe_permute(Tensor x, Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)",
        "moe_permute_backward(Tensor grad, Tensor source, Tensor topk_ids) -> Tensor",
        "moe_combine(Tensor y, Tensor source, Tensor topk_weights) -> Tensor",
        "moe_combine_backward(Tensor grad, Tensor y, Tensor source, Tensor topk_weights, bool need_y, bool need_topk_weights) -> (Tensor, Tensor)",
    ),
    "norm": (
        "rms_norm(Tensor x, Tensor? weight, float eps, bool cast_before_weight) -> Tensor",
        "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
        "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool cast_before_weight) -> (Tensor, Tensor)",
        "add_rms_norm_backward(Tensor grad_y, Tensor grad_residual, Tensor out_residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
        "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
        "layer_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
        "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
        "add_layer_norm_backward(Tensor grad_y, Tensor? grad_residual, Tensor out_residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    ),
    "paged_attention": (
        "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths, float? scale) -> Tensor",
    ),
    "rope": (
        "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
        "rope_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
        "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()",
    ),
    "selective_scan": (
        "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, Tensor? initial_state, bool dt_softplus) -> (Tensor, Tensor)",
        "selective_scan_backward(Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, Tensor? initial_state, bool dt_softplus) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "softmax": (
        "softmax(Tensor x) -> Tensor",
        "softmax_backward(Tensor grad, Tensor y) -> Tensor",
        "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor)",
        "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, float label_smoothing) -> Tensor",
        "cross_entropy_inplace_grad(Tensor(a!) logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor)",
        "cross_entropy_inplace_grad_backward(Tensor grad, Tensor(a!) out_logits) -> ()",
    ),
    "ssd_scan": (
        "ssd_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, Tensor? initial_state, bool dt_softplus, bool y_float32, float? dt_min, float? dt_max) -> (Tensor, Tensor)",
        "ssd_scan_backward(Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, Tensor? initial_state, bool dt_softplus, float? dt_min, float? dt_max) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
}
