"""One process: the oracle every other strategy on static graphs is tested against."""
