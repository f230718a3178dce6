"""Claims about speed as programs, measured beside peers in the same run. README.md says how."""
