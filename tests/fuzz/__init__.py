"""Files made to do harm, and what becomes of them."""
