"""What it costs the host to wait for small work on the device, and to fetch a tensor that is ready."""
