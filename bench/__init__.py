"""Where the time goes. Each script prints one JSON object as its last line."""
