"""Plans judged by compilers of devices that are not there."""
