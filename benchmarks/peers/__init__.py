"""Reference runs of other frameworks."""
