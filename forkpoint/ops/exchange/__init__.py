"""Exchanges between ranks."""

MOST_ROW_BYTES = 1 << 14  # the exchange kernels refuse longer rows
