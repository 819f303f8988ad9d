"""EAGLE-3 draft heads (arXiv 2503.01840): the network, and the public formats it is stored in."""
