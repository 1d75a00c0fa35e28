"""What tests of several rooms share: processes, runs of the command, tiny models."""
