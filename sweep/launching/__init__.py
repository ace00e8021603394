"""Where else a study runs: a queue, another machine, a rented one."""
