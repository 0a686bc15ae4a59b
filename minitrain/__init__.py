"""minitrain: how large language models are trained on many machines, one readable module per technique."""
