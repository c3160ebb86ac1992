"""Exchanges between ranks."""

MOST_ROW_BYTES = 1 << 14  # of a row that the exchange kernels take
