"""OpenAI's Responses API, as another format of a chat; conversations are kept in Redis."""
