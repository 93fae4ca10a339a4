"""The table of ATen operations with their rules (`rules`), read by `flow`.

An operation whose inputs hold no records needs no rule; one that is not in the table may let records reach each other.
"""

from __future__ import annotations

from sordino.graph import rules as of
from sordino.graph.rules import Rule


def _words(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_named(of.same, "clone alias detach _to_copy contiguous empty_like zeros_like ones_like full_like rand_like"),
    **_named(of.same, "randn_like randint_like bernoulli normal uniform exponential native_dropout lift_fresh lift"),
    **_named(of.same, "_conj resolve_conj zero fill random log_normal cauchy geometric"),
    **_named(of.view, "view _unsafe_view reshape _reshape_alias"),
    **_named(of.permute, "permute"),
    **_named(of.transpose, "transpose"),
    **_named(of.turn, "t"),
    **_named(of.unsqueeze, "unsqueeze"),
    **_named(of.squeeze, "squeeze"),
    **_named(of.select, "select unbind"),
    **_named(of.cut, "slice"),
    **_named(of.along, "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp sort"),
    **_named(of.along, "flip roll cummax cummin topk split unsafe_split split_with_sizes unsafe_split_with_sizes"),
    **_named(of.along, "glu argsort"),
    **_named(of.expand, "expand"),
    **_named(of.repeat, "repeat"),
    **_named(of.reduction, "sum mean amax amin max min argmax argmin var std var_mean std_mean logsumexp any all prod"),
    **_named(of.reduction, "norm linalg_vector_norm median nanmedian mode nansum nanmean count_nonzero aminmax"),
    **_named(of.reduction, "kthvalue"),
    **_named(of.matrices(0), "mm"),
    **_named(of.matrices(1), "bmm"),
    **_named(of.added_matrices, "addmm baddbmm"),
    **_named(of.vector, "mv"),
    **_named(of.linear, "linear"),
    **_named(of.convolution, "convolution conv1d conv2d conv3d"),
    **_named(of.trailing(1), "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d"),
    **_named(of.trailing(1), "upsample_linear1d max_pool1d_with_indices reflection_pad1d replication_pad1d"),
    **_named(of.trailing(2), "max_pool2d avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_avg_pool2d"),
    **_named(of.trailing(2), "adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    **_named(of.trailing(2), "reflection_pad2d replication_pad2d tril triu _upsample_bilinear2d_aa"),
    **_named(of.trailing(3), "max_pool3d avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d"),
    **_named(of.trailing(3), "upsample_nearest3d upsample_trilinear3d replication_pad3d pixel_shuffle pixel_unshuffle"),
    **_named(of.trailing(3), "im2col channel_shuffle native_channel_shuffle"),
    **_named(of.padding, "constant_pad_nd"),
    **_named(of.layer_norm, "native_layer_norm layer_norm _fused_rms_norm rms_norm"),
    **_named(of.group_norm, "native_group_norm group_norm"),
    **_named(of.batch_norm, "native_batch_norm _native_batch_norm_legit batch_norm"),
    **_named(of.batch_norm, "_native_batch_norm_legit_no_training"),
    **_named(of.embedding, "embedding"),
    **_named(of.together("self", "index"), "gather"),
    **_named(of.together("self", "index", "src"), "scatter scatter_add scatter_reduce"),
    **_named(of.attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
    **_named(of.attention, "_scaled_dot_product_flash_attention scaled_dot_product_attention"),
    **_named(of.index, "index _unsafe_index"),
    **_named(of.index_select, "index_select"),
    **_named(of.cat, "cat stack"),
    **_named(of.summed_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss"),
    **_named(of.summed_loss, "binary_cross_entropy_with_logits"),
    **_named(of.likelihood, "nll_loss_forward nll_loss2d_forward"),
    **_named(of.pointwise, "masked_fill copy where clamp dropout"),
}

# The first output alone is stated by these; whoever reads another one is refused.
FIRST_ONLY = _words(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit nll_loss_forward",
    "nll_loss2d_forward _native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu",
    "_fused_rms_norm _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention",
)

# Public tensors whose size may be the number of records: every entry is the same constant, or a fresh random number.
UNIFORM = _words(
    "zeros ones full empty rand randn new_zeros new_ones new_full new_empty expand repeat empty_strided",
    "new_empty_strided",
)

# What may be done with the places of records in a batch.
POSITIONS = _words(
    "view _unsafe_view unsqueeze expand index _unsafe_index clone alias detach _to_copy slice permute",
    "transpose lift_fresh reshape squeeze",
)

# Arguments of these operations that are sizes: they may hold the number of records.
SIZES = frozenset({"size", "shape", "N", "repeats", "stride"})
SIZED = UNIFORM | _words("view _unsafe_view reshape _reshape_alias native_group_norm")
