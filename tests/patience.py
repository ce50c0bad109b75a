"""How long tests wait for what has to happen: longer than any machine takes for it."""

PATIENCE_SECONDS = 60.0
