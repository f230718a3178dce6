"""The tests: a package, since some distributions install one of the same name into the environment."""
