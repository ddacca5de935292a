"""Operations with fast paths. Each fast path is tested against the plain version that stays beside it."""
