"""What the doors share for clients whose vhost is led by another node."""
