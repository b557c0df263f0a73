"""A federation for tests, some of whose nodes lie."""
