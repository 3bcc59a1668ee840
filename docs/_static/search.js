// The search of the sidebar (the default instance) and of search.html, which begins with the words of its ?q=.
const instances = ["default", "page"].map((name) => window.PagefindComponents.getInstanceManager().getInstance(name));
for (const { pagefindOptions } of instances) {
  // A match in the title of a guide counts most; a short page is not better than a long one.
  pagefindOptions.ranking = { metaWeights: { title: 0, guide: 5 }, pageLength: 0.3 };
}
const words = new URLSearchParams(location.search).get("q");
if (words && document.querySelector("pagefind-results[instance=page]")) instances[1].triggerSearch(words);
