"""Later, again, or never: time wheel, retry, dead letters, schedules."""
