"""Short causal depthwise convolution with a window per slot."""
