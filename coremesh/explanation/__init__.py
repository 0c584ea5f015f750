"""What libtpu made of a function, on one page: see `cm.explain`."""
