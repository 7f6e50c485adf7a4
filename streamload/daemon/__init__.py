"""The prefetch daemon of another node: demand, targets, executors, plan files; and `streamload warm`."""
