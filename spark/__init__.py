"""A reader of the log for Spark. pyspark only here, trio never."""
