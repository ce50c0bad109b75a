"""The host of a model: opens it, runs requests on its engine, and makes text of their tokens."""
