"""OpenAI's Responses API, as another format of a chat. Conversations are kept in Redis."""
