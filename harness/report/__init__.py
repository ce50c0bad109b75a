"""Model graphs side by side, for people: what each is made of and where its bytes and FLOPs go."""
