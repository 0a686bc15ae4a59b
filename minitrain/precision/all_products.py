"""Every way to compute the products of linear layers, by the names of `policies.PRODUCTS`."""

from minitrain.precision import bitnet, int8, products

PRODUCTS = products.PRODUCTS | bitnet.PRODUCTS | int8.PRODUCTS
