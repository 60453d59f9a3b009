"""What each change between two configs buys, by experiment; and what is said of it, checked."""
