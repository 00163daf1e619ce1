"""The commands of `mlx_spec`, a module each; `cli.py` lists them. For a wrong command line argparse exits with 2."""

FAILED, CTRL_C, PIPE_CLOSED = 1, 130, 141  # exit codes
