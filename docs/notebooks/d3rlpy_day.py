# %% [markdown]
# # x
# %%
print(1)
