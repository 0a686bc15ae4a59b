"""Side by side with PyTorch's own: ratios within one run, interleaved A B A B, medians."""
