"""The HTTP door: topics, messages, queues, health and metrics for programs and people who speak neither protocol."""
