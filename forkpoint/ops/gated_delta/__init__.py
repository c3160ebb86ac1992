"""The gated delta rule, chunked for prefill and recurrent for decode."""
