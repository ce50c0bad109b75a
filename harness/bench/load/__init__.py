"""A server under load, measured from outside: what its clients see."""
