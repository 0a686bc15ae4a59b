"""Every way to compute the products of linear layers, by the names of `policies.PRODUCTS`."""

from minitrain.precision import int8, products

PRODUCTS = products.PRODUCTS | int8.PRODUCTS
