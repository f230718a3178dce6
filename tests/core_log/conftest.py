"""Property tests of the log have no deadline: a busy machine is not a mistake of ours."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
