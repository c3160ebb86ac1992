"""The operators of torch that a step of the Triton kernels calls on an NPU, of a small model in fp32."""

STEP_OPERATORS = frozenset(
    {
        "aten::_to_copy",
        "aten::cat.out",
        "aten::fill_.Scalar",
        "aten::index.Tensor_out",
        "aten::index_copy.out",
        "aten::index_select",
        "aten::lt.Scalar_out",
        "aten::mm.out",
        "aten::where.self",
        "aten::where.self_out",
        "aten::zero_",
    }
)
# And where rows have drafts.
DRAFT_OPERATORS = STEP_OPERATORS | {
    "aten::add.out",
    "aten::arange.start_out",
    "aten::clamp.out",
    "aten::cumprod.out",
    "aten::eq.Tensor_out",
    "aten::floor_divide",
    "aten::mul.out",
    "aten::remainder.Tensor_out",
    "aten::sub.out",
    "aten::sum.IntList_out",
}
