"""Every number that the pages print, and the command behind it: `make claims`."""
