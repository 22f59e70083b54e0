"""What commands show: messages and progress on the terminal, tables, pictures."""
