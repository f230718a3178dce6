"""One file per subcommand of `headrace`; cli.py names them."""
