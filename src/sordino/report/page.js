(function () {
  "use strict";
  var root = document.documentElement, button = document.getElementById("theme"), tip = document.getElementById("tip");
  var themes = ["auto", "light", "dark"], at = 0;
  button.hidden = false;
  button.addEventListener("click", function () {
    at = (at + 1) % themes.length;
    if (themes[at] === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", themes[at]); }
    button.textContent = "Theme: " + themes[at];
  });
  function show(chart, spot) {
    chart.querySelectorAll(".on").forEach(function (one) { one.classList.remove("on"); });
    tip.hidden = !spot;
    if (!spot) { return; }
    spot.classList.add("on");
    tip.textContent = spot.getAttribute("data-tip");
    var box = spot.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(box.left + 10, window.innerWidth - own.width - 4)) + "px";
    tip.style.top = Math.max(4, box.top - own.height - 8) + "px";
  }
  document.querySelectorAll("svg.chart").forEach(function (chart) {
    var spots = Array.prototype.slice.call(chart.querySelectorAll("[data-tip]")), now = -1;
    if (!spots.length) { return; }
    chart.addEventListener("pointermove", function (event) {
      var best = null, least = 1e9;
      spots.forEach(function (spot) {
        var box = spot.getBoundingClientRect();
        var far = Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
        if (far < least) { least = far; best = spot; }
      });
      show(chart, least < 60 ? best : null);
    });
    chart.addEventListener("pointerleave", function () { show(chart, null); });
    chart.addEventListener("blur", function () { now = -1; show(chart, null); });
    chart.addEventListener("keydown", function (event) {
      var move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") { now = -1; show(chart, null); }
      if (!move) { return; }
      event.preventDefault();
      now = (now + move + spots.length) % spots.length;
      show(chart, spots[now]);
    });
  });
}());
