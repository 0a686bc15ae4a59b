"""Every way to compute the products of linear layers, by the names of `policies.PRODUCTS`."""

from minitrain.precision import products
from minitrain.systems.precision import bitnet, early_fp8, int4, int8

PRODUCTS = products.PRODUCTS | bitnet.PRODUCTS | early_fp8.PRODUCTS | int4.PRODUCTS | int8.PRODUCTS
