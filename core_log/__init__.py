"""The commit log: batches, segments, partitions, commit. Knows no protocol."""
