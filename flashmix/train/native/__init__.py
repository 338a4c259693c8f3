"""The library in C that cuts text into words and looks up their tokens."""
