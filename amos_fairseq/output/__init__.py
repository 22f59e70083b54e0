"""What commands show: messages, progress and tables on the terminal."""
