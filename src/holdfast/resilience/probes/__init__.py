"""Health probes with known answers. Each runs in a child process with a time limit; a child that hangs is a finding."""
