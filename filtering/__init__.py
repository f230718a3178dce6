"""Which records match: topic trie, tag expressions, batch summaries. Pure."""
