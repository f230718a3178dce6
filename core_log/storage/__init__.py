"""Where bytes rest: one contract, real files and faulty memory."""
